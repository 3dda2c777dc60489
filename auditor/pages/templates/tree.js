"use strict";
const svg=document.querySelector('.tree-view svg'),all=[...svg.querySelectorAll('.node')],root=svg.querySelector('g');
const below=g=>g.classList.contains('folded')?[]:[...(g.querySelector(':scope>.below')?.children??[])];
let end=0,deep=0;
function columns(g){const b=below(g);if(b.length){b.forEach(columns);g.at=(b[0].at+b[1].at)/2}else{
const w=g.classList.contains('node')?FOLDED:WIDTH;g.at=end+w/2;end+=w}}
function place(g,from,down,top=down){const x=g.at-from;
deep=Math.max(deep,top+40+g.querySelectorAll(':scope>image').length*SHOT);g.setAttribute('transform',`translate(${x},${down})`);
g.querySelector(':scope>.edge')?.setAttribute('d',`M${-x} ${14-down}C${-x} ${-down/2} 0 ${-down/2} 0 -12`);
below(g).forEach(c=>place(c,g.at,HEIGHT,top+HEIGHT))}
function lay(){end=deep=0;columns(root);end=Math.max(end,160);place(root,0,TOP);svg.setAttribute('width',end);
svg.setAttribute('height',deep);svg.setAttribute('viewBox',`0 0 ${end} ${deep}`)}
function fold(which){all.forEach(n=>n.classList.toggle('folded',which(n)));lay();say();show()}
function show(){const leaf=svg.querySelector('.leaf.on'),s=document.querySelector('.tree-view');
const x=leaf?leaf.at:root.at;s.scrollLeft=x-s.clientWidth/2}
function say(){all.forEach(n=>n.querySelector(':scope>.box').setAttribute('aria-expanded',!n.classList.contains('folded')))}
function toggle(n,e){n.classList.toggle('folded');lay();say();e.stopPropagation()}
all.forEach(n=>{const box=n.querySelector(':scope>.box');box.setAttribute('role','button');box.setAttribute('tabindex','0');
box.setAttribute('aria-label',box.textContent);box.addEventListener('click',e=>toggle(n,e));
box.addEventListener('keydown',e=>{if(e.key==='Enter'||e.key===' '){e.preventDefault();toggle(n,e)}})});
const off=n=>!n.classList.contains('on'),marked=!!svg.querySelector('.on');
document.getElementById('fold').onclick=()=>fold(off);
document.getElementById('open').onclick=()=>fold(()=>false);
const many=svg.querySelectorAll('.leaf').length>MANY;
fold(n=>many&&(marked?off(n):n.dataset.level>=3));
